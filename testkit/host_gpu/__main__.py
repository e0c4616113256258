"""megatrain's command line where torch finds the device of testkit/host_gpu."""

from __future__ import annotations

import testkit.host_gpu  # noqa: F401
from megatrain.__main__ import main

if __name__ == "__main__":
    main()
