"""The HTML page of results and its charts."""
