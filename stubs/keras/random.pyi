from typing import Any

from keras import Variable

class SeedGenerator:
    def __init__(self, seed: int | None = None, name: str | None = None) -> None: ...
    state: Variable

def __getattr__(name: str) -> Any: ...
