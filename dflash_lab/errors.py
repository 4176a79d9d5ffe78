"""One exception for everything a user can get wrong.

The command line turns it into one line on standard error and exit status 2. A message
names the value, the limit and the way out. Leaves out: internal errors, which stay
ordinary Python exceptions with their tracebacks because they are ours to mend.
"""


class DFlashLabError(ValueError):
    """Bad input: value, limit and way out in one sentence or two."""
