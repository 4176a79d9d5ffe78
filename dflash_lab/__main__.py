"""`python -m dflash_lab` is `dflash-lab`."""

from dflash_lab.cli import main

raise SystemExit(main())
