"""The quickstart's parts: its data sets, the gold rule, the base, the evaluation, the tables. Not a whole run."""

import json
import random
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from rich.console import Console

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import quickstart  # noqa: E402
import quickstart_base  # noqa: E402
import quickstart_data  # noqa: E402
import quickstart_evaluation  # noqa: E402
import quickstart_report  # noqa: E402
import quickstart_stages  # noqa: E402
