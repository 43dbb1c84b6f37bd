"""`python -m torch_ort_ckpt`."""

import sys

from .cli import main

sys.exit(main())
