"""Rewrites of graphs: each keeps the mathematics."""
