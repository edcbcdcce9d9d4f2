"""Random schedules, executors and reference methods that the tests of the core share."""
