"""Artifacts for older clients: written here, trained by each release of ONNX Runtime in an environment of its own. `tox -e clients`."""
