"""Training at scale: the checkpoint manager, the runner, what a resume needs, distributed runs."""
