"""What all tests share."""

import pytest
import torch
from hypothesis import settings

# The same examples every time, and no time limit for each, since machines are shared.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def seed():
    """Every test draws the same random numbers, alone or among others."""
    torch.manual_seed(0)


@pytest.fixture
def one_thread():
    """Threads that wait for each other take longer than one, on machines with other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
