"""torchrun, which a signal ends without a traceback: whoever sent it knows why, and the script's last line says so."""

import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.run import main

try:
    main()
except SignalException as signal:
    sys.exit(128 + signal.sigval)
