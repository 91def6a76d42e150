"""torchrun that ends without a traceback on a signal; the launch script's last line gives the
reason.
"""

import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.run import main

try:
    main()
except SignalException as signal:
    sys.exit(128 + signal.sigval)
