"""Forward and backward passes, their components and checks, and the state of a run."""
