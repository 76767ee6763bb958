//! Launches the GPU kernels in `kernels.cu`, with their arguments in order.

use std::sync::Arc;

use convoke_comm::device::cudarc::driver::{
    CudaFunction, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError, LaunchArgs, LaunchConfig,
    PushKernelArg,
};
use convoke_comm::device::cudarc::nvrtc::Ptx;

const THREADS: u32 = 128;

/// The GPU kernels of `digits`, bound to one CUDA stream.
pub(crate) struct Kernels {
    stream: Arc<CudaStream>,
    gather: CudaFunction,
    forward: CudaFunction,
    softmax: CudaFunction,
    sum: CudaFunction,
    weights_gradient: CudaFunction,
    bias_gradient: CudaFunction,
    errors_before: CudaFunction,
    descend: CudaFunction,
    add_loss: CudaFunction,
}

/// The shape of a layer: number of inputs, number of units, and rows of a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layer {
    pub(crate) inputs: u32,
    pub(crate) units: u32,
    pub(crate) rows: u32,
}

#[allow(unsafe_code)]
impl Kernels {
    pub(crate) fn new(stream: &Arc<CudaStream>) -> Result<Self, DriverError> {
        let module = stream.context().load_module(Ptx::from_src(include_str!("kernels.ptx")))?;
        let function = |name| module.load_function(name);
        Ok(Self {
            stream: Arc::clone(stream),
            gather: function("gather")?,
            forward: function("forward")?,
            softmax: function("softmax")?,
            sum: function("sum")?,
            weights_gradient: function("weights_gradient")?,
            bias_gradient: function("bias_gradient")?,
            errors_before: function("errors_before")?,
            descend: function("descend")?,
            add_loss: function("add_loss")?,
        })
    }

    /// Copies the pixels of the chosen examples to `rows`.
    ///
    /// # Safety
    /// The first `count` elements of `chosen` are numbers of examples in `all`.
    pub(crate) unsafe fn gather(
        &self,
        rows: &mut CudaSlice<f32>,
        all: &CudaSlice<f32>,
        chosen: &CudaSlice<u32>,
        pixels: u32,
        count: u32,
    ) -> Result<(), DriverError> {
        let values = pixels * count;
        check_lens([(rows.len(), values), (chosen.len(), count)]);
        let mut launch = self.stream.launch_builder(&self.gather);
        launch.arg(rows).arg(all).arg(chosen).arg(&pixels).arg(&values);
        // SAFETY: these are the kernel's arguments. `rows` has `values` elements, and the caller guarantees
        // the indices in `chosen`.
        unsafe { start(launch, values) }
    }

    /// Computes the outputs of a layer from its inputs.
    pub(crate) fn forward(
        &self,
        given: &mut CudaSlice<f32>,
        from: &CudaSlice<f32>,
        (weights, bias): (&CudaSlice<f32>, &CudaSlice<f32>),
        Layer { inputs, units, rows }: Layer,
        is_rectified: bool,
    ) -> Result<(), DriverError> {
        let (values, rectified) = (units * rows, u32::from(is_rectified));
        check_lens([
            (given.len(), values),
            (from.len(), inputs * rows),
            (weights.len(), inputs * units),
            (bias.len(), units),
        ]);
        let mut launch = self.stream.launch_builder(&self.forward);
        launch.arg(given).arg(from).arg(weights).arg(bias);
        launch.arg(&inputs).arg(&units).arg(&values).arg(&rectified);
        // SAFETY: these are the kernel's arguments, whose lengths were checked.
        unsafe { start(launch, values) }
    }

    /// Replaces scores by the derivatives of the loss by them, times `weight`, and computes the loss of each
    /// row.
    ///
    /// # Safety
    /// The first `rows` elements of `chosen` are indices of `labels`, and all labels are below `classes`.
    pub(crate) unsafe fn softmax(
        &self,
        (scores, losses): (&mut CudaSlice<f32>, &mut CudaSlice<f32>),
        labels: &CudaSlice<u32>,
        chosen: &CudaSlice<u32>,
        classes: u32,
        weight: f32,
        rows: u32,
    ) -> Result<(), DriverError> {
        check_lens([(scores.len(), classes * rows), (losses.len(), rows), (chosen.len(), rows)]);
        let mut launch = self.stream.launch_builder(&self.softmax);
        launch.arg(scores).arg(losses).arg(labels).arg(chosen).arg(&classes).arg(&weight).arg(&rows);
        // SAFETY: these are the kernel's arguments, whose lengths were checked. The caller guarantees the
        // labels, and the indices in `chosen`.
        unsafe { start(launch, rows) }
    }

    /// Computes the sum of the first `count` values, times `weight`.
    pub(crate) fn sum(
        &self,
        mut into: impl DevicePtrMut<f32>,
        of: &CudaSlice<f32>,
        weight: f32,
        count: u32,
    ) -> Result<(), DriverError> {
        check_lens([(into.len(), 1), (of.len(), count)]);
        let (into, _written) = into.device_ptr_mut(&self.stream);
        let mut launch = self.stream.launch_builder(&self.sum);
        launch.arg(&into).arg(of).arg(&weight).arg(&count);
        // SAFETY: these are the kernel's arguments, whose lengths were checked; it writes one value.
        unsafe { start(launch, 1) }
    }

    pub(crate) fn weights_gradient(
        &self,
        mut gradient: impl DevicePtrMut<f32>,
        errors: &CudaSlice<f32>,
        from: &CudaSlice<f32>,
        Layer { inputs, units, rows }: Layer,
    ) -> Result<(), DriverError> {
        check_lens([
            (gradient.len(), inputs * units),
            (errors.len(), units * rows),
            (from.len(), inputs * rows),
        ]);
        let (gradient, _written) = gradient.device_ptr_mut(&self.stream);
        let mut launch = self.stream.launch_builder(&self.weights_gradient);
        launch.arg(&gradient).arg(errors).arg(from).arg(&inputs).arg(&units).arg(&rows);
        // SAFETY: these are the kernel's arguments, whose lengths were checked.
        unsafe { start(launch, inputs * units) }
    }

    pub(crate) fn bias_gradient(
        &self,
        mut gradient: impl DevicePtrMut<f32>,
        errors: &CudaSlice<f32>,
        Layer { units, rows, .. }: Layer,
    ) -> Result<(), DriverError> {
        check_lens([(gradient.len(), units), (errors.len(), units * rows)]);
        let (gradient, _written) = gradient.device_ptr_mut(&self.stream);
        let mut launch = self.stream.launch_builder(&self.bias_gradient);
        launch.arg(&gradient).arg(errors).arg(&units).arg(&rows);
        // SAFETY: these are the kernel's arguments, whose lengths were checked.
        unsafe { start(launch, units) }
    }

    /// Computes the derivatives of the loss by a layer's inputs.
    pub(crate) fn input_errors(
        &self,
        before: &mut CudaSlice<f32>,
        errors: &CudaSlice<f32>,
        weights: &CudaSlice<f32>,
        from: &CudaSlice<f32>,
        Layer { inputs, units, rows }: Layer,
    ) -> Result<(), DriverError> {
        let values = inputs * rows;
        check_lens([
            (before.len(), values),
            (errors.len(), units * rows),
            (weights.len(), inputs * units),
            (from.len(), values),
        ]);
        let mut launch = self.stream.launch_builder(&self.errors_before);
        launch.arg(before).arg(errors).arg(weights).arg(from).arg(&inputs).arg(&units).arg(&values);
        // SAFETY: these are the kernel's arguments, whose lengths were checked.
        unsafe { start(launch, values) }
    }

    pub(crate) fn sgd_step(
        &self,
        (values, velocity): (&mut CudaSlice<f32>, &mut CudaSlice<f32>),
        gradient: &impl DevicePtr<f32>,
        (rate, momentum): (f32, f32),
    ) -> Result<(), DriverError> {
        let count = values.len() as u32;
        check_lens([(velocity.len(), count), (gradient.len(), count)]);
        let (gradient, _read) = gradient.device_ptr(&self.stream);
        let mut launch = self.stream.launch_builder(&self.descend);
        launch.arg(values).arg(velocity).arg(&gradient).arg(&rate).arg(&momentum).arg(&count);
        // SAFETY: these are the kernel's arguments; all three have `count` elements.
        unsafe { start(launch, count) }
    }

    pub(crate) fn add_loss(
        &self,
        total: &mut CudaSlice<f64>,
        loss: &impl DevicePtr<f32>,
        weight: f64,
    ) -> Result<(), DriverError> {
        check_lens([(total.len(), 1), (loss.len(), 1)]);
        let (loss, _read) = loss.device_ptr(&self.stream);
        let mut launch = self.stream.launch_builder(&self.add_loss);
        launch.arg(total).arg(&loss).arg(&weight);
        // SAFETY: these are the kernel's arguments; it changes one value.
        unsafe { start(launch, 1) }
    }
}

/// Panics unless each buffer has at least as many elements as the kernel uses: (has, uses). A kernel that
/// leaves a buffer would change other memory of the device.
fn check_lens<const N: usize>(buffers: [(usize, u32); N]) {
    for (has, uses) in buffers {
        assert!(has >= uses as usize, "a buffer of {has} elements, of which the kernel uses {uses}");
    }
}

/// Launches a kernel with at least `threads` threads.
///
/// # Safety
/// The arguments match the kernel's signature, and the kernel stays within its buffers.
#[allow(unsafe_code)]
unsafe fn start(mut launch: LaunchArgs<'_>, threads: u32) -> Result<(), DriverError> {
    if threads == 0 {
        // This rank has no examples.
        return Ok(());
    }
    let (grid_dim, block_dim) = ((threads.div_ceil(THREADS), 1, 1), (THREADS, 1, 1));
    let shape = LaunchConfig { grid_dim, block_dim, shared_mem_bytes: 0 };
    // SAFETY: the caller guarantees that the arguments match the kernel, and that it stays within them.
    unsafe { launch.launch(shape) }.map(drop)
}
