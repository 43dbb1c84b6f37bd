"""A plain `nn.Module` from a graph, and its source as text."""
