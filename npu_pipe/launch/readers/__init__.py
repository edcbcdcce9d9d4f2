"""One file a launcher: how its environment variables make a World. `precedence` chooses."""
