"""What is right: references that know their own error, the bound that a claimed arithmetic allows, and the verdict between the two."""
