"""For those who write an adapter, or break things on purpose.

The conformance suite, small models, failpoints, and the processes of `weightsync soak`.
"""

import sys

# Before pytest imports the suite, so that a failed check shows its values. Without pytest the
# models are of use, too.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite("weightsync.testing.conformance")
