//! The images of handwritten digits, compiled into the program. So a worker needs neither a path nor a
//! network.

use std::io::Read;

use convoke_train::Random;
use flate2::read::GzDecoder;

/// The compressed images and labels. README.md beside this file gives its origin, its licence and the
/// expected accuracy.
const COMPRESSED: &[u8] = include_bytes!("digits.csv.gz");

/// Number of pixels of one image, 8 x 8.
pub const PIXELS: usize = 64;
/// Number of classes: digits 0 to 9.
pub const CLASSES: usize = 10;
/// Maximum value of a pixel in the file.
const MAX_BRIGHTNESS: u8 = 16;

/// Number of the random sequence that splits the data set; see [`Random::new`].
const SPLIT_STREAM: u64 = 1;

/// One image and the digit that it shows.
#[derive(Debug, Clone, PartialEq)]
pub struct Example {
    /// Brightness of the pixels, row by row, from 0 (dark) to 1.
    pub pixels: [f32; PIXELS],
    /// The digit, below [`CLASSES`].
    pub label: usize,
}

/// Error: the data set in the program is damaged.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The data is not valid gzip.
    #[error("images: not gzip, or damaged")]
    Compression,
    /// A line is not an image and its digit.
    #[error("images: line {line}: expected {PIXELS} pixels of 0 to {MAX_BRIGHTNESS} and a digit")]
    Line {
        /// Number of the line, from 1.
        line: usize,
    },
}

/// Training examples, and held-out examples to measure accuracy.
#[derive(Debug)]
pub struct Split {
    /// Four fifths of the examples, to train on.
    pub training: Vec<Example>,
    /// One fifth of the examples, to measure accuracy.
    pub held_out: Vec<Example>,
}

/// Loads all examples and holds out a fifth of them. Only the seed decides which examples are held out.
///
/// # Errors
/// Returns an error if the data set in this program is damaged.
pub fn load(seed: u64) -> Result<Split, DataError> {
    let mut text = String::new();
    GzDecoder::new(COMPRESSED).read_to_string(&mut text).map_err(|_| DataError::Compression)?;
    let mut examples = parse(&text)?;
    Random::new(seed, SPLIT_STREAM).shuffle(&mut examples);
    let training = examples.split_off(examples.len() / 5);
    Ok(Split { training, held_out: examples })
}

fn parse(text: &str) -> Result<Vec<Example>, DataError> {
    text.lines().enumerate().map(|(i, line)| example(line).ok_or(DataError::Line { line: i + 1 })).collect()
}

fn example(line: &str) -> Option<Example> {
    let mut fields = line.split(',').map(|field| field.parse::<u8>().ok());
    let mut pixels = [0.0; PIXELS];
    for pixel in &mut pixels {
        let value = fields.next()??;
        *pixel = (value <= MAX_BRIGHTNESS).then(|| f32::from(value) / f32::from(MAX_BRIGHTNESS))?;
    }
    let label = usize::from(fields.next()??);
    (label < CLASSES && fields.next().is_none()).then_some(Example { pixels, label })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn all_images_are_present_and_one_fifth_is_test_data() {
        let split = load(1).unwrap();
        assert_eq!((split.training.len(), split.held_out.len()), (1438, 359));
        for class in 0..CLASSES {
            let count = split.training.iter().filter(|example| example.label == class).count();
            assert!((110..180).contains(&count), "{count} images of {class}");
        }
    }

    #[test]
    fn the_split_follows_the_seed() {
        assert_eq!(load(1).unwrap().held_out, load(1).unwrap().held_out);
        assert_ne!(load(1).unwrap().held_out, load(2).unwrap().held_out);
    }

    #[test]
    fn pixels_are_scaled_to_one() {
        let line = format!("16,8,{}7", "0,".repeat(62));
        let parsed = example(&line).unwrap();
        assert_eq!((parsed.pixels[0], parsed.pixels[1], parsed.pixels[63], parsed.label), (1.0, 0.5, 0.0, 7));
    }

    #[test]
    fn a_malformed_line_is_named() {
        let good = format!("{}3", "0,".repeat(64));
        let too_bright = format!("17,{}3", "0,".repeat(63));
        let no_digit = format!("{}10", "0,".repeat(64));
        for bad in ["", "1,2,3", "x", &too_bright, &no_digit, &format!("{good},1"), &format!("-1{good}")] {
            assert_eq!(parse(&format!("{good}\n{bad}\n")), Err(DataError::Line { line: 2 }), "{bad}");
        }
    }
}
