"""A request's life as log lines and metrics. Reads stamps and effects; decides nothing."""

from __future__ import annotations

import logging

from pd.runtime.core.events import Stamp


def log_stamp(log: logging.Logger, stamp: Stamp) -> None:
    """One line an event of a request's life, the subject first."""
    log.info("%s %s %s", stamp.subject, stamp.what, stamp.detail)
