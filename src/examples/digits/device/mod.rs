//! Training steps on a GPU. Images, network and gradients stay on the GPU, and the host waits for the GPU
//! once per epoch.

mod kernels;

use std::mem::swap;
use std::sync::Arc;

use convoke_comm::device::cudarc::driver::{CudaSlice, CudaStream, DriverError};
use convoke_comm::device::{self, DeviceError, DeviceOptions};
use convoke_comm::{CommError, World};
use convoke_train::{DdpOptions, DeviceDdp, ParameterId, Trace};
use kernels::{Kernels, Layer};

use crate::arguments::{Arguments, ComputeDevice};
use crate::network::Network;
use crate::train::TrainError;
use convoke_example_data::{CLASSES, Example, PIXELS};

/// A network on this rank's GPU.
pub(crate) struct DeviceTraining {
    stream: Arc<CudaStream>,
    kernels: Kernels,
    ddp: DeviceDdp,
    /// The parameters, and the loss as the last one.
    ids: Vec<ParameterId>,
    units: Vec<usize>,
    parameters: Vec<CudaSlice<f32>>,
    velocity: Vec<CudaSlice<f32>>,
    /// The pixels of all training images, one image after the other, and their digits.
    pixels: CudaSlice<f32>,
    labels: CudaSlice<u32>,
    /// Indices of the images of the current batch.
    chosen: CudaSlice<u32>,
    /// The input of each layer, and the output of the last layer. The latter holds first the scores, then the
    /// derivatives of the loss by them.
    rows: Vec<CudaSlice<f32>>,
    /// Derivatives of the loss by a layer's outputs, and by its inputs.
    errors: CudaSlice<f32>,
    before: CudaSlice<f32>,
    losses: CudaSlice<f32>,
    /// Sum of the losses of the current epoch.
    total_loss: CudaSlice<f64>,
    /// Learning rate and momentum.
    rates: (f32, f32),
}

impl DeviceTraining {
    /// Copies `network` and all training images to the GPU. All ranks call this function.
    pub(crate) fn new(
        arguments: &Arguments,
        world: &World,
        network: &Network,
        examples: &[Example],
        trace: &Trace,
        momentum: f32,
    ) -> Result<Self, TrainError> {
        let context = device::open_for_rank(world)?;
        let options = DeviceOptions::default().staged(arguments.device == ComputeDevice::Staged);
        let group = world.with_device(&context, options)?;
        let stream = context.new_stream().map_err(failed)?;
        let shapes = network.shapes().chain([("loss".to_owned(), 1)]);
        let size = arguments.bucket_bytes;
        let options = DdpOptions::default().bucket_bytes(size).first_bucket_bytes(size).trace(trace);
        let (ddp, ids) = DeviceDdp::new(&group, &context, shapes, options.overlap(arguments.overlaps()))?;
        let most = arguments.batch.min(examples.len());
        let units = &network.units;
        let widest = units.iter().copied().max().unwrap_or(1);
        // The kernels use 32-bit indices.
        let counts =
            |a: usize, b: usize| a.checked_mul(b).is_some_and(|values| u32::try_from(values).is_ok());
        if !counts(most, widest) || !units.windows(2).all(|pair| counts(pair[0], pair[1])) {
            return Err(TrainError::TooLarge { batch: most, units: widest });
        }
        let pixels: Vec<f32> = examples.iter().flat_map(|example| example.pixels).collect();
        let labels: Vec<u32> = examples.iter().map(|example| example.label as u32).collect();
        let zeros = |len: usize| stream.alloc_zeros::<f32>(len).map_err(failed);
        let copy = |values: &Vec<f32>| stream.clone_htod(values).map_err(failed);
        Ok(Self {
            kernels: Kernels::new(&stream).map_err(failed)?,
            parameters: network.parameters.iter().map(copy).collect::<Result<_, _>>()?,
            velocity: network.velocity.iter().map(copy).collect::<Result<_, _>>()?,
            pixels: copy(&pixels)?,
            labels: stream.clone_htod(&labels).map_err(failed)?,
            chosen: stream.alloc_zeros(most).map_err(failed)?,
            rows: units.iter().map(|units| zeros(most * units)).collect::<Result<_, _>>()?,
            errors: zeros(most * widest)?,
            before: zeros(most * widest)?,
            losses: zeros(most)?,
            total_loss: stream.alloc_zeros(1).map_err(failed)?,
            units: units.clone(),
            rates: (arguments.learning_rate, momentum),
            stream,
            ddp,
            ids,
        })
    }

    /// Enqueues one training step on a batch. `own` are the indices of this rank's examples in the batch.
    pub(crate) fn step(&mut self, own: &[usize], weight: f32, examples: usize) -> Result<(), TrainError> {
        let chosen: Vec<u32> = own.iter().map(|&index| index as u32).collect();
        let count = chosen.len() as u32;
        if count > 0 {
            let mut batch = self.chosen.slice_mut(..chosen.len());
            self.stream.memcpy_htod(&chosen, &mut batch).map_err(failed)?;
        }
        self.forward(count).map_err(failed)?;
        self.backward(weight, count)?;
        let loss = self.parameters.len();
        for parameter in 0..loss {
            let values = (&mut self.parameters[parameter], &mut self.velocity[parameter]);
            let average = self.ddp.average(self.ids[parameter]);
            self.kernels.sgd_step(values, &average, self.rates).map_err(failed)?;
        }
        let average = self.ddp.average(self.ids[loss]);
        self.kernels.add_loss(&mut self.total_loss, &average, examples as f64).map_err(failed)?;
        Ok(())
    }

    fn forward(&mut self, count: u32) -> Result<(), DriverError> {
        let Self { kernels, rows, .. } = self;
        // SAFETY: the host has written the first `count` of `chosen`, which are numbers of examples.
        #[allow(unsafe_code)]
        unsafe { kernels.gather(&mut rows[0], &self.pixels, &self.chosen, PIXELS as u32, count) }?;
        let last = self.units.len() - 2;
        for layer in 0..=last {
            let (before, after) = rows.split_at_mut(layer + 1);
            let of_layer = (&self.parameters[2 * layer], &self.parameters[2 * layer + 1]);
            let shape = shape(&self.units, layer, count);
            kernels.forward(&mut after[0], &before[layer], of_layer, shape, layer < last)?;
        }
        Ok(())
    }

    /// Enqueues on the GPU what [`Network::backward`] does on the host: first the loss, then the gradients
    /// from the last layer on.
    fn backward(&mut self, weight: f32, count: u32) -> Result<(), TrainError> {
        let Self { kernels, ddp, ids, rows, losses, errors, before, parameters, .. } = self;
        let last = self.units.len() - 1;
        let mut pass = ddp.pass(&self.stream);
        let (inputs, scores) = rows.split_at_mut(last);
        let scores = &mut scores[0];
        // SAFETY: as in `forward`; and labels are digits, below `CLASSES`.
        #[allow(unsafe_code)]
        let errors_of_scores = unsafe {
            kernels.softmax((&mut *scores, losses), &self.labels, &self.chosen, CLASSES as u32, weight, count)
        };
        errors_of_scores
            .and_then(|()| self.stream.memcpy_dtod(scores, &mut errors.slice_mut(..scores.len())))
            .map_err(failed)?;
        let loss = ids[parameters.len()];
        kernels.sum(pass.gradient(loss)?, losses, weight, count).map_err(failed)?;
        pass.ready(loss)?;
        for layer in (0..last).rev() {
            let shape = shape(&self.units, layer, count);
            let (weights, bias) = (ids[2 * layer], ids[2 * layer + 1]);
            kernels.bias_gradient(pass.gradient(bias)?, errors, shape).map_err(failed)?;
            pass.ready(bias)?;
            let gradient = pass.gradient(weights)?;
            kernels.weights_gradient(gradient, errors, &inputs[layer], shape).map_err(failed)?;
            pass.ready(weights)?;
            if layer > 0 {
                let weights = &parameters[2 * layer];
                kernels.input_errors(before, errors, weights, &inputs[layer], shape).map_err(failed)?;
                swap(errors, before);
            }
        }
        Ok(pass.finish()?)
    }

    /// Waits for all steps of an epoch. Copies the parameters to `network` and returns the sum of the losses.
    pub(crate) fn end_epoch(&mut self, network: &mut Network) -> Result<f64, TrainError> {
        let (on_device, on_host) = (
            self.parameters.iter().chain(&self.velocity),
            network.parameters.iter_mut().chain(&mut network.velocity),
        );
        for (from, into) in on_device.zip(on_host) {
            self.stream.memcpy_dtoh(from, into).map_err(failed)?;
        }
        let mut total = [0.0];
        self.stream.memcpy_dtoh(&self.total_loss, &mut total).map_err(failed)?;
        self.stream.memset_zeros(&mut self.total_loss).map_err(failed)?;
        self.stream.synchronize().map_err(failed)?;
        Ok(total[0])
    }
}

fn shape(units: &[usize], layer: usize, rows: u32) -> Layer {
    Layer { inputs: units[layer] as u32, units: units[layer + 1] as u32, rows }
}

fn failed(error: DriverError) -> CommError {
    CommError::Device(DeviceError::driver("the device failed")(error))
}
