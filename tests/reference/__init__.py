"""What a correct result is: single-process loops that every strategy equals to the bit."""
