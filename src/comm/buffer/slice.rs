//! Values in memory without their Rust type: the address, the number of values, and the form in which they
//! are sent. The typed calls and the untyped ones (`api/raw`) meet here.

use std::marker::PhantomData;
use std::ops::Range;

use crate::collectives::dtype::{Dtype, Transfer};
use crate::collectives::kernels::copy;

/// The form of a value: `units` elements of type `dtype`. Plain data are so many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ValueType {
    pub(crate) dtype: Dtype,
    units: u32,
    /// The size of a value. It is kept, so that a call need not compute it.
    bytes: u32,
}

impl ValueType {
    /// Values of one element each.
    #[inline]
    pub(crate) const fn element(dtype: Dtype) -> Self {
        Self { dtype, units: 1, bytes: dtype.size_bytes() as u32 }
    }

    #[inline]
    pub(crate) const fn of<T: Transfer>() -> Self {
        let dtype = T::TYPE.dtype();
        // `TransferType` refuses types of 4 GiB or more.
        Self { dtype, units: (size_of::<T>() / dtype.size_bytes()) as u32, bytes: size_of::<T>() as u32 }
    }

    #[inline]
    pub(crate) const fn units(self) -> usize {
        self.units as usize
    }

    #[inline]
    pub(crate) const fn size_bytes(self) -> usize {
        self.bytes as usize
    }
}

/// Values in memory, for as long as `Borrow` lasts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Values<Borrow> {
    start: *mut u8,
    len: usize,
    value: ValueType,
    borrowed: PhantomData<Borrow>,
}

/// Values that are borrowed for reading.
pub(crate) type Slice<'a> = Values<&'a [u8]>;

/// Values that are borrowed exclusively.
pub(crate) type SliceMut<'a> = Values<&'a mut [u8]>;

/// Values that an operation owns.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// Aligned for every element type.
    memory: Box<[u128]>,
    len: usize,
    value: ValueType,
}

impl<'a, T: Transfer> From<&'a [T]> for Slice<'a> {
    #[inline]
    fn from(values: &'a [T]) -> Self {
        let (start, value) = (values.as_ptr().cast_mut().cast(), ValueType::of::<T>());
        Self { start, len: values.len(), value, borrowed: PhantomData }
    }
}

impl<'a, T: Transfer> From<&'a mut [T]> for SliceMut<'a> {
    #[inline]
    fn from(values: &'a mut [T]) -> Self {
        let (start, value) = (values.as_mut_ptr().cast(), ValueType::of::<T>());
        Self { start, len: values.len(), value, borrowed: PhantomData }
    }
}

#[allow(unsafe_code)]
impl<Borrow> Values<Borrow> {
    /// # Safety
    /// For the lifetime of the result, `len` valid values of type `value` are at `start`, which is aligned
    /// for them. Nobody writes to them, and nobody else accesses those of a [`SliceMut`].
    #[inline]
    pub(crate) unsafe fn from_raw_parts(start: *mut u8, len: usize, value: ValueType) -> Self {
        Self { start, len, value, borrowed: PhantomData }
    }

    #[inline]
    pub(super) fn start(&self) -> *mut u8 {
        self.start
    }

    /// Returns the number of values.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(crate) fn value_type(&self) -> ValueType {
        self.value
    }

    #[inline]
    pub(crate) fn size_bytes(&self) -> usize {
        self.len * self.value.size_bytes()
    }

    /// Returns the values of a range. The caller lets no two [`SliceMut`] overlap.
    #[inline]
    fn range(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} values", self.len);
        let start = self.start.wrapping_add(range.start * self.value.size_bytes());
        Self { start, len: range.len(), value: self.value, borrowed: PhantomData }
    }
}

impl Slice<'_> {
    /// Returns the values of a range.
    #[inline]
    pub(crate) fn part(&self, range: Range<usize>) -> Self {
        self.range(range)
    }
}

#[allow(unsafe_code)]
impl SliceMut<'_> {
    /// Returns the values for reading.
    #[inline]
    pub(crate) fn as_slice(&self) -> Slice<'_> {
        Slice { start: self.start, len: self.len, value: self.value, borrowed: PhantomData }
    }

    /// Returns the values before `at`, and the rest.
    #[inline]
    pub(crate) fn split_at(self, at: usize) -> (Self, Self) {
        (self.range(0..at), self.range(at..self.len))
    }

    /// Splits the values into those before the range `own`, in the range, and after it.
    #[inline]
    pub(crate) fn split_around(self, own: Range<usize>) -> (Self, Self, Self) {
        let (rest, behind) = self.split_at(own.end);
        let (before, own) = rest.split_at(own.start);
        (before, own, behind)
    }

    /// Copies all values of `from`, of equal type and number.
    #[inline]
    pub(crate) fn copy_from(&mut self, from: Slice<'_>) {
        assert!(from.len == self.len && from.value == self.value, "{from:?} is copied into {self:?}");
        // SAFETY: both have so many bytes; `self` is borrowed exclusively, so they are apart.
        unsafe { copy(from.start, self.start, from.size_bytes()) };
    }
}

#[allow(unsafe_code)]
impl Scratch {
    /// Returns `len` zeros.
    #[inline]
    pub(crate) fn zeros(len: usize, value: ValueType) -> Self {
        let words = (len * value.size_bytes()).div_ceil(size_of::<u128>());
        Self { memory: vec![0; words].into_boxed_slice(), len, value }
    }

    /// Returns a copy of the values of `slice`.
    #[inline]
    pub(crate) fn of(slice: Slice<'_>) -> Self {
        Self::copy_of(slice.value, std::iter::once(slice))
    }

    /// Returns a copy of bytes.
    pub(super) fn copy_of_bytes(bytes: &[u8]) -> Self {
        Self::of(bytes.into())
    }

    /// Returns a copy of the values of `slices`, one after the other; all have type `value`.
    #[inline]
    pub(crate) fn copy_of<'s>(value: ValueType, slices: impl Iterator<Item = Slice<'s>> + Clone) -> Self {
        let mut scratch = Self::zeros(slices.clone().map(|slice| slice.len).sum(), value);
        let mut rest = scratch.as_mut();
        for slice in slices {
            let (mut into, behind) = rest.split_at(slice.len);
            into.copy_from(slice);
            rest = behind;
        }
        scratch
    }

    #[inline]
    pub(super) fn as_mut(&mut self) -> SliceMut<'_> {
        // SAFETY: the memory is aligned, has room for the values, and is borrowed exclusively. All zeros are
        // valid values of every type.
        unsafe { SliceMut::from_raw_parts(self.memory.as_mut_ptr().cast(), self.len, self.value) }
    }

    #[inline]
    pub(super) fn into_memory(self) -> Box<[u128]> {
        self.memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_slices_count_values() {
        let values = [[1_u16, 2], [3, 4], [5, 6]];
        let slice = Slice::from(values.as_flattened());
        let (mut into, mut all) = ([0_u16; 2], [0_u16; 4]);
        SliceMut::from(&mut into[..]).copy_from(slice.part(3..5));
        assert_eq!(into, [4, 5]);
        let (mut before, mut own, behind) = SliceMut::from(&mut all[..]).split_around(1..3);
        before.copy_from(slice.part(5..6));
        own.copy_from(slice.part(0..2));
        assert_eq!((behind.len(), all), (1, [6, 1, 2, 0]));
    }

    #[test]
    fn scratch_holds_copies_in_order() {
        let (first, second) = ([1_u8, 2, 3], [4_u8; 20]);
        let slices = [Slice::from(&first[..]), Slice::from(&second[..])];
        let mut scratch = Scratch::copy_of(ValueType::element(Dtype::U8), slices.into_iter());
        let mut all = [0_u8; 23];
        SliceMut::from(&mut all[..]).copy_from(scratch.as_mut().as_slice());
        assert_eq!((all[..4].to_vec(), all[22]), (vec![1, 2, 3, 4], 4));
    }

    #[test]
    #[should_panic = "is copied into"]
    fn values_of_another_type_are_not_copied() {
        SliceMut::from(&mut [0_i32][..]).copy_from(Slice::from(&[0.0_f32][..]));
    }
}
