"""`python -m dflash_lab` is `dflash-lab`."""

from dflash_lab.cli.main import main

raise SystemExit(main())
