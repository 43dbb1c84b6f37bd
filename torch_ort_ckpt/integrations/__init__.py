"""Glue for frameworks: Lightning. Imported only when asked for."""
