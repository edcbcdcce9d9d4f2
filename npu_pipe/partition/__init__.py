"""Layers into stages."""
