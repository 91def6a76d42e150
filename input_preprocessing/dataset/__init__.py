"""Preparation of a whole data set, from download to manifest."""
