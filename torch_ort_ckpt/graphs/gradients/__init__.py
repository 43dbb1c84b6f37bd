"""Building gradient graphs, and checking that an exported graph computes the same as its module."""
