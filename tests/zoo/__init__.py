"""Small versions of real architectures, exported and compared with PyTorch. `tox -e zoo` runs all of them (`python -m tests.zoo.run`)."""
