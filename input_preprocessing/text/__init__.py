"""Text to tokens: sentences, vocabulary, WordPiece; corpora of any text."""
