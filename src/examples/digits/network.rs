//! A network with one hidden layer: 64 pixels, 64 rectified units, softmax over 10 digits.
//!
//! Pure: no clock, no I/O. All parameters lie in one flat buffer, and so do their gradients: one
//! collective moves them all.

use crate::data::{CLASSES, Example, PIXELS};
use crate::random::Random;

/// Units of the hidden layer.
const HIDDEN: usize = 64;

/// Where each layer lies in the flat buffer: weights (one row a unit), then one bias a unit.
const HIDDEN_BIAS: usize = HIDDEN * PIXELS;
const OUTPUT_WEIGHTS: usize = HIDDEN_BIAS + HIDDEN;
const OUTPUT_BIAS: usize = OUTPUT_WEIGHTS + CLASSES * HIDDEN;
/// Number of parameters.
pub(crate) const PARAMETERS: usize = OUTPUT_BIAS + CLASSES;

/// Stream of random numbers for the initial weights; see [`Random::new`].
const WEIGHT_STREAM: u64 = 2;

/// The parameters and what stochastic gradient descent remembers of earlier steps.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Network {
    /// [`PARAMETERS`] of them.
    pub(crate) parameters: Vec<f32>,
    /// Momentum, one value a parameter.
    pub(crate) velocity: Vec<f32>,
}

impl Network {
    /// All zero: a place for what another rank broadcasts. It cannot be trained from.
    pub(crate) fn empty() -> Self {
        Self { parameters: vec![0.0; PARAMETERS], velocity: vec![0.0; PARAMETERS] }
    }

    /// Uniform weights with the variance of He et al. 2015 (doi:10.1109/ICCV.2015.123), biases zero.
    pub(crate) fn initial(seed: u64) -> Self {
        let mut random = Random::new(seed, WEIGHT_STREAM);
        let mut network = Self::empty();
        for (weights, inputs) in [(0..HIDDEN_BIAS, PIXELS), (OUTPUT_WEIGHTS..OUTPUT_BIAS, HIDDEN)] {
            let bound = (6.0 / inputs as f32).sqrt();
            network.parameters[weights].fill_with(|| random.symmetric(bound));
        }
        network
    }

    /// Adds the gradient of this example's loss to `gradient` and returns the loss (cross-entropy, nats).
    pub(crate) fn accumulate(&self, example: &Example, gradient: &mut [f32]) -> f32 {
        let (hidden, mut scores) = self.forward(example);
        let loss = log_sum_exp(&scores) - scores[example.label];

        // Of the scores: softmax, less one for the right digit.
        softmax(&mut scores);
        scores[example.label] -= 1.0;
        let mut of_hidden = [0.0; HIDDEN];
        for (class, &error) in scores.iter().enumerate() {
            let row = OUTPUT_WEIGHTS + class * HIDDEN;
            for unit in 0..HIDDEN {
                gradient[row + unit] += error * hidden[unit];
                of_hidden[unit] += error * self.parameters[row + unit];
            }
            gradient[OUTPUT_BIAS + class] += error;
        }
        for unit in (0..HIDDEN).filter(|&unit| hidden[unit] > 0.0) {
            let error = of_hidden[unit];
            let row = &mut gradient[unit * PIXELS..][..PIXELS];
            for (value, pixel) in row.iter_mut().zip(&example.pixels) {
                *value += error * pixel;
            }
            gradient[HIDDEN_BIAS + unit] += error;
        }
        loss
    }

    /// The digit with the highest score.
    pub(crate) fn predict(&self, example: &Example) -> usize {
        let (_, scores) = self.forward(example);
        (0..CLASSES).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap_or(0)
    }

    /// One step of gradient descent with momentum: `v = momentum * v + gradient; p -= rate * v`.
    pub(crate) fn descend(&mut self, gradient: &[f32], rate: f32, momentum: f32) {
        for ((p, v), g) in self.parameters.iter_mut().zip(&mut self.velocity).zip(gradient) {
            *v = momentum * *v + g;
            *p -= rate * *v;
        }
    }

    fn forward(&self, example: &Example) -> ([f32; HIDDEN], [f32; CLASSES]) {
        let mut hidden = [0.0; HIDDEN];
        for (unit, value) in hidden.iter_mut().enumerate() {
            let weights = &self.parameters[unit * PIXELS..][..PIXELS];
            *value = (dot(weights, &example.pixels) + self.parameters[HIDDEN_BIAS + unit]).max(0.0);
        }
        let mut scores = [0.0; CLASSES];
        for (class, value) in scores.iter_mut().enumerate() {
            let weights = &self.parameters[OUTPUT_WEIGHTS + class * HIDDEN..][..HIDDEN];
            *value = dot(weights, &hidden) + self.parameters[OUTPUT_BIAS + class];
        }
        (hidden, scores)
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn log_sum_exp(scores: &[f32; CLASSES]) -> f32 {
    let highest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    highest + scores.iter().map(|score| (score - highest).exp()).sum::<f32>().ln()
}

fn softmax(scores: &mut [f32; CLASSES]) {
    let total = log_sum_exp(scores);
    for score in scores {
        *score = (*score - total).exp();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data;

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        let example = &data::load(1).unwrap().training[0];
        let network = Network::initial(1);
        let mut gradient = vec![0.0; PARAMETERS];
        network.accumulate(example, &mut gradient);
        let loss_with = |index: usize, change: f32| {
            let mut moved = network.clone();
            moved.parameters[index] += change;
            f64::from(moved.accumulate(example, &mut vec![0.0; PARAMETERS]))
        };
        // Some of every layer; a step in one weight changes the loss by step x gradient.
        for index in (0..PARAMETERS)
            .step_by(97)
            .chain(OUTPUT_WEIGHTS..OUTPUT_WEIGHTS + 8)
            .chain(OUTPUT_BIAS..PARAMETERS)
        {
            let step = 1e-2;
            let slope = (loss_with(index, step) - loss_with(index, -step)) / f64::from(2.0 * step);
            assert!(
                (slope - f64::from(gradient[index])).abs() < 2e-3,
                "{index}: {slope} {}",
                gradient[index]
            );
        }
    }

    #[test]
    fn an_undecided_network_loses_the_logarithm_of_ten() {
        let example = &data::load(1).unwrap().training[0];
        let loss = Network::empty().accumulate(example, &mut vec![0.0; PARAMETERS]);
        assert!((loss - 10f32.ln()).abs() < 1e-6, "{loss}");
    }

    #[test]
    fn extreme_scores_stay_finite() {
        let mut network = Network::empty();
        network.parameters[OUTPUT_BIAS] = 1e30;
        let mut example = data::load(1).unwrap().training[0].clone();
        example.label = 1;
        let mut gradient = vec![0.0; PARAMETERS];
        assert!(network.accumulate(&example, &mut gradient).is_finite());
        assert!(gradient.iter().all(|value| value.is_finite()));
        assert_eq!(network.predict(&example), 0);
    }

    #[test]
    fn momentum_carries_on() {
        let mut network = Network::empty();
        let gradient = vec![1.0; PARAMETERS];
        network.descend(&gradient, 0.5, 0.5);
        network.descend(&gradient, 0.5, 0.5);
        assert_eq!((network.velocity[0], network.parameters[0]), (1.5, -1.25));
    }
}
