//! Enums whose variants have a text and a number.

/// Defines an enum, the list of its variants, and a function that returns the text of a variant. The place in
/// the list is the variant's number in messages and recordings, so a new variant stands at the end.
macro_rules! named_enum {
    (
        $(#[$of_enum:meta])*
        $vis:vis enum $Enum:ident { $($(#[$of_variant:meta])* $Variant:ident = $text:literal,)* }
        $(#[$of_list:meta])*
        $vis_of_list:vis const ALL: [Self; _];
        $(#[$of_function:meta])*
        pub(crate) const fn $function:ident(self) -> &'static str;
    ) => {
        $(#[$of_enum])*
        $vis enum $Enum {
            $($(#[$of_variant])* $Variant,)*
        }

        #[allow(unused_doc_comments)] // on the elements and arms that repeat the variants
        impl $Enum {
            $(#[$of_list])*
            $vis_of_list const ALL: [Self; [$($(#[$of_variant])* $Enum::$Variant,)*].len()] =
                [$($(#[$of_variant])* Self::$Variant,)*];

            $(#[$of_function])*
            pub(crate) const fn $function(self) -> &'static str {
                match self {
                    $($(#[$of_variant])* Self::$Variant => $text,)*
                }
            }
        }
    };
}
pub(super) use named_enum;
