"""What a round holds, who wins it, and the order of rounds and steps. Pure."""
