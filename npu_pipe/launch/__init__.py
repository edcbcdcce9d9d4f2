"""How the ranks of a job come to be: World from a launcher's environment, and our own local launch.

This is the only folder that reads environment variables. `world`, its readers and `local` import
no torch; `store` loads it when called.
"""
