"""Who makes the gradient graph, and the check that an exported graph computes what its module does."""
