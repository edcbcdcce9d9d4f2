"""The environment variables that matter to a pipeline, and what is wrong with them.

A rule is a function from the surroundings to what it finds. They only look: what a variable does
was read in the manuals and sources of CANN, torch_npu, NCCL and torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from npu_pipe.comm.preflight import Need, check_needs
from npu_pipe.errors import ConfigError
from npu_pipe.finding import Finding, Verdict, refusal
from npu_pipe.launch.interfaces import interface_findings
from npu_pipe.launch.preflight import hccl_settings
from npu_pipe.launch.surroundings import Surroundings
from npu_pipe.launch.variables import is_whole

__all__ = ["OWN", "WATCHED", "setting_findings", "values_found"]

WATCHED = (
    *("OMP_NUM_THREADS", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
    *("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_IF_IP"),
    *("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "HCCL_EVENT_TIMEOUT"),
    *("HCCL_BUFFSIZE", "P2P_HCCL_BUFFSIZE", "STREAMS_PER_DEVICE", "TASK_QUEUE_ENABLE"),
    *("HCCL_IF_BASE_PORT", "HCCL_WHITELIST_DISABLE", "HCCL_WHITELIST_FILE", "RANK_TABLE_FILE"),
    *("ASCEND_LAUNCH_BLOCKING", "ASCEND_GLOBAL_LOG_LEVEL", "ASCEND_RT_VISIBLE_DEVICES"),
    *("TORCH_HCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING"),
    *("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_NO_NPU_MEMORY_CACHING"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("NCCL_DEBUG", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_P2P_DISABLE"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
)
"""In the order in which they are shown."""

OWN = ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "HCCL_IF_IP")
"""Those of which each host or rank has its own."""

_MSRUN = ("MS_ROLE", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT", "RANK_SIZE", "DEVICE_ID")
_BIG_BUFFER_MB = 200


def values_found(at: Surroundings) -> dict[str, str]:
    """Those that are set, with their values."""
    return {name: text for name in WATCHED if (text := at.value(name)) is not None}


def setting_findings(at: Surroundings) -> tuple[Finding, ...]:
    """One that lists what is set, and one for each that is wrong."""
    values = values_found(at)
    told = ", ".join(f"{name}={text}" for name, text in values.items()) or "none of those is set"
    wrong = (finding for rule in _RULES for finding in rule(at))
    return (Finding("variables", told), *wrong)


def _say(facts: str, cure: str, verdict: Verdict = Verdict.WARN) -> Finding:
    return Finding("variables", facts, verdict, cure)


def _time_outs(at: Surroundings) -> Iterator[Finding]:
    """Their order, and the other numbers of HCCL: as `npu_pipe.comm.preflight` has the rules."""
    try:
        nothing = (Need(0, 0, 0, 0),)  # the lanes' own needs are checked with their schedule
        check_needs(
            nothing,
            hccl_settings(environ=at.environ),
            local_rank=max(at.local_ranks - 1, 0),
            is_free=lambda _: True,  # ports are looked at by themselves
        )
    except ConfigError as error:
        yield refusal("variables", error, verdict=at.verdict("hccl"))


def _blocking(at: Surroundings) -> Iterator[Finding]:
    for name in ("ASCEND_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT"):
        if at.is_on(name):
            yield _say(
                f"{name}={at.value(name)}: the host waits for each operator and transfer, so that "
                "nothing runs beside anything else",
                f"unset {name}; it is for finding the operator that fails",
            )


def _buffers(at: Surroundings) -> Iterator[Finding]:
    name = "P2P_HCCL_BUFFSIZE"  # one that is no number is refused with the other numbers
    text = at.value(name) or ""
    if is_whole(text) and int(text) > _BIG_BUFFER_MB:
        yield _say(
            f"{name}={text}: each neighbour takes 2 lanes x 2 x {text} MB of a device, "
            f"{8 * int(text)} MB for the two of a rank in the middle",
            f"unset {name} (20), unless you measured that more helps",
        )


def _queues(at: Surroundings) -> Iterator[Finding]:
    text = at.value("TASK_QUEUE_ENABLE")
    if text == "0":
        yield _say(
            "TASK_QUEUE_ENABLE=0: the thread that computes hands each operator to the NPU itself",
            "unset TASK_QUEUE_ENABLE (1)",
        )
    elif text not in (None, "1", "2"):
        yield _say(f"TASK_QUEUE_ENABLE is 0, 1 or 2; it is {text!r:.40}", "unset it (1)")
    if at.value("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield _say(
            "CUDA_DEVICE_MAX_CONNECTIONS=1: streams share one way to the device, and a transfer "
            "may stand behind compute that it does not need",
            "unset it (8), unless other parts of your program rely on it",
        )


def _threads(at: Surroundings) -> Iterator[Finding]:
    text, cores, ranks = at.value("OMP_NUM_THREADS"), at.host.cores, at.local_ranks
    if text is None:
        return
    first = text.split(",")[0].strip()
    threads = int(first) if is_whole(first) else 0
    if threads == 0:
        yield _say(
            f"OMP_NUM_THREADS={text!r:.40} is no number of threads", "give threads a rank, or unset"
        )
        return
    if threads * ranks > cores and threads > 1:
        yield _say(
            f"OMP_NUM_THREADS={threads} x {ranks} ranks on {cores} cores: they take turns, and "
            "all of them are slow",
            f"OMP_NUM_THREADS={max(cores // ranks, 1)}",
        )
    elif at.is_msrun and threads == 1 and cores >= 4 * ranks and at.backend != "gloo":
        yield _say(
            f"OMP_NUM_THREADS=1 on {cores} cores for {ranks} ranks: msrun sets it, and what runs "
            "on the host (data, tokenisers) has one thread",
            f"set it in your script's environment: up to {cores // ranks}",
        )


def _loading(at: Surroundings) -> Iterator[Finding]:
    if at.is_bare and at.value("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        yield _say(
            "TORCH_DEVICE_BACKEND_AUTOLOAD is not 0, and torch_npu is here without CANN: a plain "
            "`import torch` fails (npu-pipe sets it for itself)",
            "export TORCH_DEVICE_BACKEND_AUTOLOAD=0, or install CANN and source its set_env.sh",
        )


def _leaks(at: Surroundings) -> Iterator[Finding]:
    left = [name for name in _MSRUN if at.value(name) is not None]
    if left and not at.is_msrun:
        yield _say(
            f"left over from msrun: {', '.join(left)}",
            f"unset {' '.join(left)}, or start the ranks with msrun",
        )
    if "mindspore" in (at.value("LD_LIBRARY_PATH") or ""):
        yield _say(
            "LD_LIBRARY_PATH names folders of mindspore, as msrun leaves it: libraries of its own "
            "come before those that torch was built with",
            "take them out before the program starts, unless it uses mindspore too",
        )


def _logs(at: Surroundings) -> Iterator[Finding]:
    if at.value("ASCEND_GLOBAL_LOG_LEVEL") in ("0", "1"):
        yield _say(
            f"ASCEND_GLOBAL_LOG_LEVEL={at.value('ASCEND_GLOBAL_LOG_LEVEL')}: CANN logs each call, "
            "which slows all of them",
            "unset it (3)",
        )
    if at.value("NCCL_DEBUG") == "TRACE":
        yield _say("NCCL_DEBUG=TRACE: NCCL logs each call", "NCCL_DEBUG=WARN, or unset it")


def _caching(at: Surroundings) -> Iterator[Finding]:
    for name in ("PYTORCH_NO_NPU_MEMORY_CACHING", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        if at.value(name) is not None:
            yield _say(
                f"{name} is set: each tensor waits for the device to give it memory",
                f"unset {name}",
            )


def _errors(at: Surroundings) -> Iterator[Finding]:
    for name in ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING"):
        if at.is_on(name):
            yield _say(
                f"{name}={at.value(name)}: torch_npu ends a process as soon as a peer is lost, "
                "before npu-pipe can say which, and why",
                f"unset {name}: npu-pipe sets 0",
            )


def _reach(at: Surroundings) -> Iterator[Finding]:
    if at.value("HCCL_WHITELIST_DISABLE") == "0" and at.value("HCCL_WHITELIST_FILE") is None:
        yield _say(
            "HCCL_WHITELIST_DISABLE=0 lets those hosts connect that HCCL_WHITELIST_FILE lists, and "
            "that is not set",
            "unset HCCL_WHITELIST_DISABLE (1), or give the file",
            at.verdict("hccl"),
        )
    if at.is_on("NCCL_P2P_DISABLE"):
        yield _say(
            "NCCL_P2P_DISABLE: devices of a host send through its memory",
            "unset NCCL_P2P_DISABLE, unless they hang without it",
        )
    yield from interface_findings(at)


_RULES: tuple[Callable[[Surroundings], Iterator[Finding]], ...] = (
    *(_time_outs, _reach, _blocking, _buffers, _queues, _threads),
    *(_loading, _leaks, _logs, _caching, _errors),
)
