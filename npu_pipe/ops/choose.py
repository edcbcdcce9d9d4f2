"""Which provider does a product, by their documented rules, and why not the ones before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from npu_pipe.errors import ConfigError
from npu_pipe.ops.need import Need
from npu_pipe.ops.provider import Provider, Refusal
from npu_pipe.ops.ranks import Ranks

__all__ = ["Choice", "choose", "pick", "table", "told"]


class Choice(NamedTuple):
    """refused: what stood before the chosen one, and why it was not taken."""

    need: Need
    provider: Provider
    refused: tuple[tuple[str, Refusal], ...]


def pick(providers: Sequence[Provider], wanted: str | None) -> Sequence[Provider]:
    """All of them, in their order, or the one of that name. Raises ConfigError for no such name."""
    if wanted is None:
        return providers
    found = [each for each in providers if each.name == wanted]
    if not found:
        raise ConfigError(
            f"providers of fused operators are {', '.join(each.name for each in providers)}",
            f"{wanted!r} was asked for",
            "take one of them, or none to have it chosen",
        )
    return found


def choose(need: Need, providers: Iterable[Provider], ranks: Ranks) -> Choice:
    """The first provider that serves the need.

    Raises ConfigError, with the last one's reason, if none does: where one was picked by name.
    """
    refused: list[tuple[str, Refusal]] = []
    for provider in providers:
        why = _other_device(provider, ranks) or provider.refusal(need, ranks)
        if why is None:
            return Choice(need, provider, tuple(refused))
        refused.append((provider.name, why))
    if not refused:
        raise ConfigError(
            "a product of layers that are cut over ranks has a provider",
            f"none was given for {need}",
            "give npu_pipe_kernels.providers.providers()",
        )
    name, why = refused[-1]
    raise ConfigError(
        f"provider {name}: {why.rule}",
        f"{why.facts}, in {need}",
        f"{why.cure}, or force no provider",
    )


def table(choices: Iterable[Choice]) -> tuple[tuple[str, str, str], ...]:
    """Rows for a person: the product, who does it, and why not those before; for preflight."""
    return tuple(
        (
            str(need),
            provider.name,
            "; ".join(f"not {name}: {why.rule}, and {why.facts}" for name, why in refused),
        )
        for need, provider, refused in choices
    )


def told(rows: Iterable[tuple[str, str, str]]) -> str:
    """Such rows as lines: each provider, with why no faster one, and below it its products."""
    products: dict[str, list[str]] = {}
    for need, who, why in rows:
        products.setdefault(f"{who}{f', {why}' * bool(why)}:", []).append(f"  {need}")
    return "\n".join(line for who, needs in products.items() for line in (who, *needs))


def _other_device(provider: Provider, ranks: Ranks) -> Refusal | None:
    if provider.kind is None or provider.kind == ranks.place.type:
        return None
    return Refusal(
        f"it is for tensors on {provider.kind}",
        f"these are on {ranks.place.type}",
        f"move the model to a device of kind {provider.kind}",
    )
