"""A complete training job, small enough to read: what `ckptengine demo` runs."""
