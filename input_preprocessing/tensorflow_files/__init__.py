"""TensorFlow's files, read and written without TensorFlow."""
