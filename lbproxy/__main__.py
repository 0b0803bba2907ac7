# SPDX-License-Identifier: Apache-2.0
"""`python -m lbproxy`."""

import sys

from lbproxy.commands.cli import main

sys.exit(main())
