"""Glue for frameworks: Lightning, ExecuTorch. Imported only when asked for."""
