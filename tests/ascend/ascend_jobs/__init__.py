"""Jobs for ranks with an NPU; see tests/gloo/cluster.py."""
