"""python -m npu_pipe: the command line, with this interpreter."""

from __future__ import annotations

import sys

from npu_pipe.cli.main import main

sys.exit(main())
