"""What a run must not forget, on disk: written by the coordinator while it runs, read when it comes
back."""
