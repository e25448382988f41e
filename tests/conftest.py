"""What all tests share."""

import resource
from contextlib import contextmanager

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


@pytest.fixture
def full_disk():
    """
    Make a context in which no file grows beyond 4,096 bytes, which fails as a full disk does.

    It is for one call and not for the whole test: where pytest's own output is kept in a file, that file is full too.
    """

    @contextmanager
    def full():
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return full
