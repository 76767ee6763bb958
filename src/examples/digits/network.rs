//! A network of fully connected layers: 64 pixels, hidden layers of rectified units, softmax over 10 digits.
//!
//! Pure: no clock, no I/O. The backward pass computes gradients from the last layer to the first. It passes
//! each gradient to the caller at once, so that it can be sent while the next gradients are computed.

use convoke_train::Random;

use convoke_example_data::{CLASSES, Example, PIXELS};

/// Number of the random sequence of the initial weights; see [`Random::new`].
const WEIGHT_STREAM: u64 = 2;
/// Number of independent sums in a dot product, so that the compiler can use vector registers.
const SIMD_LANES: usize = 8;

/// The parameters, and the momentum of stochastic gradient descent.
///
/// Layer `l` has two parameters: `2 l` holds weights, one row per unit, and `2 l + 1` one bias per unit.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Network {
    /// Number of units of each layer; pixels are the first layer, classes the last.
    pub(crate) units: Vec<usize>,
    pub(crate) parameters: Vec<Vec<f32>>,
    /// Momentum of gradient descent, one value for each parameter value.
    pub(crate) velocity: Vec<Vec<f32>>,
}

/// The outputs of all layers for some examples: one row for each example.
#[derive(Debug)]
pub(crate) struct Activations(Vec<Vec<f32>>);

impl Network {
    /// Returns a network of zeros, with hidden layers of the given sizes. It is only a place for the
    /// parameters of another rank or a checkpoint; training cannot start from zeros.
    pub(crate) fn empty(hidden: &[usize]) -> Self {
        let units: Vec<usize> =
            std::iter::once(PIXELS).chain(hidden.iter().copied()).chain([CLASSES]).collect();
        let layers = units.windows(2);
        let zeros: Vec<Vec<f32>> =
            layers.flat_map(|pair| [vec![0.0; pair[0] * pair[1]], vec![0.0; pair[1]]]).collect();
        Self { units, velocity: zeros.clone(), parameters: zeros }
    }

    /// Returns a network with random uniform weights, with the variance of He et al. 2015
    /// (doi:10.1109/ICCV.2015.123) and zero biases.
    pub(crate) fn initial(hidden: &[usize], seed: u64) -> Self {
        let mut random = Random::new(seed, WEIGHT_STREAM);
        let mut network = Self::empty(hidden);
        for layer in 0..network.layers() {
            let bound = (6.0 / network.units[layer] as f32).sqrt();
            network.parameters[2 * layer].fill_with(|| random.symmetric(bound));
        }
        network
    }

    pub(crate) fn hidden(&self) -> &[usize] {
        &self.units[1..self.units.len() - 1]
    }

    fn layers(&self) -> usize {
        self.units.len() - 1
    }

    /// Names of the parameters, and number of values of each.
    pub(crate) fn shapes(&self) -> impl Iterator<Item = (String, usize)> + '_ {
        self.parameters.iter().enumerate().map(|(index, values)| {
            let what = if index % 2 == 0 { "weights" } else { "bias" };
            (format!("layer{}.{what}", index / 2), values.len())
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.parameters.iter().map(Vec::len).sum()
    }

    pub(crate) fn forward(&self, examples: &[&Example]) -> Activations {
        let pixels: Vec<f32> = examples.iter().flat_map(|example| example.pixels).collect();
        let mut rows = vec![pixels];
        for layer in 0..self.layers() {
            let (inputs, outputs) = (self.units[layer], self.units[layer + 1]);
            let (weights, bias) = (&self.parameters[2 * layer], &self.parameters[2 * layer + 1]);
            let mut given = vec![0.0; examples.len() * outputs];
            for (given, from) in given.chunks_exact_mut(outputs).zip(rows[layer].chunks_exact(inputs)) {
                for ((value, weights), bias) in given.iter_mut().zip(weights.chunks_exact(inputs)).zip(bias) {
                    let sum = dot(weights, from) + bias;
                    *value = if layer + 1 < self.layers() { sum.max(0.0) } else { sum };
                }
            }
            rows.push(given);
        }
        Activations(rows)
    }

    /// Passes the gradients of the examples' losses, times `weight`, to `take`, from the last layer to the
    /// first. The first call passes the sum of the losses (cross-entropy, nats), times `weight`, as an
    /// additional parameter.
    ///
    /// # Errors
    /// Returns the first error of `take`.
    pub(crate) fn backward<E>(
        &self,
        examples: &[&Example],
        Activations(rows): Activations,
        weight: f32,
        mut take: impl FnMut(usize, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut errors, mut loss) = (rows[self.layers()].clone(), 0.0);
        for (scores, example) in errors.as_chunks_mut::<CLASSES>().0.iter_mut().zip(examples) {
            loss += log_sum_exp(scores) - scores[example.label];
            // The derivative of the loss by the scores is softmax, minus one for the correct digit.
            softmax(scores);
            scores[example.label] -= 1.0;
            scores.iter_mut().for_each(|error| *error *= weight);
        }
        take(self.parameters.len(), &[weight * loss])?;
        for layer in (0..self.layers()).rev() {
            let (inputs, outputs) = (self.units[layer], self.units[layer + 1]);
            let (mut of_weights, mut of_bias) = (vec![0.0; inputs * outputs], vec![0.0; outputs]);
            for (errors, from) in errors.chunks_exact(outputs).zip(rows[layer].chunks_exact(inputs)) {
                for (row, &error) in
                    of_weights.chunks_exact_mut(inputs).zip(errors).filter(|(_, error)| **error != 0.0)
                {
                    add_scaled(row, error, from);
                }
                add_scaled(&mut of_bias, 1.0, errors);
            }
            take(2 * layer + 1, &of_bias)?;
            take(2 * layer, &of_weights)?;
            if layer > 0 {
                errors = self.input_errors(layer, &errors, &rows[layer]);
            }
        }
        Ok(())
    }

    /// Computes the derivatives of the loss by the inputs of `layer`, which are outputs of rectified units.
    /// Where such an output is zero, the derivative is zero.
    fn input_errors(&self, layer: usize, errors: &[f32], given: &[f32]) -> Vec<f32> {
        let (inputs, outputs) = (self.units[layer], self.units[layer + 1]);
        let mut before = vec![0.0; given.len()];
        let rows = before.chunks_exact_mut(inputs).zip(errors.chunks_exact(outputs));
        for ((before, errors), given) in rows.zip(given.chunks_exact(inputs)) {
            for (weights, &error) in self.parameters[2 * layer].chunks_exact(inputs).zip(errors) {
                add_scaled(before, error, weights);
            }
            for (before, &given) in before.iter_mut().zip(given) {
                *before = if given > 0.0 { *before } else { 0.0 };
            }
        }
        before
    }

    /// Returns the digit with the highest score.
    pub(crate) fn predict(&self, example: &Example) -> usize {
        let Activations(rows) = self.forward(&[example]);
        let scores = &rows[self.layers()];
        (0..CLASSES).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap_or(0)
    }

    /// One step of gradient descent with momentum: `v = momentum * v + gradient; p -= rate * v`.
    pub(crate) fn sgd_step(&mut self, parameter: usize, gradient: &[f32], rate: f32, momentum: f32) {
        let values = self.parameters[parameter].iter_mut().zip(&mut self.velocity[parameter]);
        for ((p, v), g) in values.zip(gradient) {
            *v = momentum * *v + g;
            *p -= rate * *v;
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((wide_a, rest_a), (wide_b, rest_b)) = (a.as_chunks::<SIMD_LANES>(), b.as_chunks::<SIMD_LANES>());
    let mut sums = [0.0; SIMD_LANES];
    for (a, b) in wide_a.iter().zip(wide_b) {
        for lane in 0..SIMD_LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f32>() + rest_a.iter().zip(rest_b).map(|(x, y)| x * y).sum::<f32>()
}

fn add_scaled(into: &mut [f32], factor: f32, from: &[f32]) {
    into.iter_mut().zip(from).for_each(|(into, from)| *into += factor * from);
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

    /// Returns the loss of these examples and its gradient.
    fn gradient(network: &Network, examples: &[&Example]) -> (f32, Vec<Vec<f32>>) {
        let mut gradient = network.parameters.clone();
        gradient.push(vec![0.0]);
        let mut order = Vec::new();
        let take = |parameter: usize, values: &[f32]| {
            order.push(parameter);
            gradient[parameter].copy_from_slice(values);
            Ok::<(), ()>(())
        };
        network.backward(examples, network.forward(examples), 0.5, take).unwrap();
        assert!(
            order.iter().rev().copied().eq(0..=network.parameters.len()),
            "each once, the last layer first: {order:?}"
        );
        let loss = gradient.pop().unwrap()[0];
        (loss, gradient)
    }

    #[test]
    fn gradient_matches_finite_differences() {
        let data = convoke_example_data::load(1).unwrap();
        let examples: Vec<&Example> = data.training.iter().take(3).collect();
        for hidden in [&[][..], &[20], &[13, 9]] {
            let network = Network::initial(hidden, 1);
            let (_, slopes) = gradient(&network, &examples);
            for (parameter, slopes) in slopes.iter().enumerate() {
                for (index, &got) in slopes.iter().enumerate().step_by(7) {
                    // A step in one weight changes the loss by step x gradient.
                    let step = 2e-3;
                    let loss_with = |change: f32| {
                        let mut moved = network.clone();
                        moved.parameters[parameter][index] += change;
                        f64::from(gradient(&moved, &examples).0)
                    };
                    let slope = (loss_with(step) - loss_with(-step)) / f64::from(2.0 * step);
                    let got = f64::from(got);
                    assert!((slope - got).abs() < 4e-3, "{hidden:?}, {parameter}, {index}: {slope} {got}");
                }
            }
        }
    }

    #[test]
    fn uniform_prediction_has_loss_ln_10() {
        let data = convoke_example_data::load(1).unwrap();
        let (loss, _) = gradient(&Network::empty(&[64]), &[&data.training[0], &data.training[1]]);
        assert!((loss - 10f32.ln()).abs() < 1e-6, "{loss}");
    }

    #[test]
    fn extreme_scores_stay_finite() {
        let mut network = Network::empty(&[64]);
        network.parameters[3][0] = 1e30;
        let mut example = convoke_example_data::load(1).unwrap().training[0].clone();
        example.label = 1;
        let (loss, gradient) = gradient(&network, &[&example]);
        assert!(loss.is_finite() && gradient.iter().flatten().all(|value| value.is_finite()));
        assert_eq!(network.predict(&example), 0);
    }

    #[test]
    fn momentum_accumulates() {
        let mut network = Network::empty(&[]);
        let gradient = vec![1.0; CLASSES];
        network.sgd_step(1, &gradient, 0.5, 0.5);
        network.sgd_step(1, &gradient, 0.5, 0.5);
        assert_eq!((network.velocity[1][0], network.parameters[1][0]), (1.5, -1.25));
    }

    #[test]
    fn dot_products_include_all_values() {
        for len in 0..40 {
            let a: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let want: f32 = a.iter().map(|x| 2.0 * x).sum();
            assert_eq!(dot(&a, &vec![2.0; len]), want, "{len}");
        }
    }
}
