"""How many files and sockets this process may open."""

import logging
import resource
import sys

logger = logging.getLogger(__name__)

_WANTED_OPEN_FILES = 65536


def raise_file_limit() -> int:
    """Allows this process many open files, or as many as the system lets it; returns how many."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    wanted = min(hard, _WANTED_OPEN_FILES)
    if soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))
    except (OSError, ValueError) as error:  # a lower limit of the system
        logger.debug("the limit of open files stays at %d: %s", soft, error)
        return soft
    return wanted
