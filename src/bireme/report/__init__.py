"""Programs and timelines for the eye: the terminal, pictures, traces, documents."""
