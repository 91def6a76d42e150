"""A whole data set: its inputs and the preparation from download to manifest."""
