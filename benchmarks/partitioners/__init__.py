"""What other systems cut, as published, to hold ours against."""
