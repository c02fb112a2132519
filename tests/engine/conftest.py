import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded; some CPU kernels heed nothing else

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
