"""The predictor: a small recurrent drafter distilled from the answers of the model it will draft for."""
