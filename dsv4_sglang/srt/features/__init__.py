"""Sleep, disaggregation, the integrity audit and collectives."""
