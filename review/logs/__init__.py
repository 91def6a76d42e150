"""What a run leaves behind, its log and its folder, and how anything is printed."""
