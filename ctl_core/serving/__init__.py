"""What a trained run is used with: its model as a function, predictions and exports of it."""
